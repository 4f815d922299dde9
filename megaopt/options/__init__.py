"""The options that the constructors take, checked."""
