"""Ways to fit a bigger model and to see what a step costs; engines compose them, and each is off unless asked for."""
