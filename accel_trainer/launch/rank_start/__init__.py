"""The folder that comes first on the path of a rank; `sitecustomize` says why."""
