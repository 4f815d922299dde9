"""Times the optimizer step against a copy of as many bytes, beside other libraries' optimizers.

`command.main` is `megaopt bench`. Nothing is imported here: the doctor needs the cases, and not
the pictures, for which matplotlib looks through all fonts the first time.
"""
