"""Matrix products with the bits of Hopper's tensor cores, on any machine: docs/numbers.md."""
