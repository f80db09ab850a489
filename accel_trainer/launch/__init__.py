"""The command line and the launchers."""
