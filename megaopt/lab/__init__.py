"""The command line and what only it needs; the library never imports it."""
