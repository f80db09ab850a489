"""Ways to fit a bigger model, or to see what a step costs; any engine composes with them, and each is off unless asked for."""
