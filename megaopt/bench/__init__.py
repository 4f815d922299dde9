"""The step against a same-run copy: `megaopt bench`."""
