"""`accel-trainer check`: lines of scripts and configurations that work as they are, and those that do not."""
