"""Plans of layouts: the memory and the collectives of a rank, without the job."""
