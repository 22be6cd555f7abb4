"""Memory of this process that others map."""
