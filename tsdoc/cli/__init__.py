"""The command line. `console` is the only module that prints."""
