"""From a staged directory to a published checkpoint: locks, disk space, retries, the rename, retention."""
