"""The promises of docs/numbers.md, tried where one stands: `megaopt doctor --check`."""
