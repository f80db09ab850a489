"""Where this process is: rank, device, process group, collectives."""
