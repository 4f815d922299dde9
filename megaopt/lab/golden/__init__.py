"""The golden record: hashes of weights and states after each of 20 steps, case by case.

`megaopt verify` takes the steps of cases anew and compares. A bit that moves is seen as a line
of record.json that changes. Inputs are made of integers, and everything goes through what a user
imports, so that neither a library nor a change inside the package moves them.
"""
