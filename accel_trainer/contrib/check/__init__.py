"""`accel-trainer check`: what of a script or a configuration works as it is, and what does not; nothing is imported."""
