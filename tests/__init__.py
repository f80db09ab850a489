"""A package, so that no other distribution's top-level `tests` can be imported in its place."""
