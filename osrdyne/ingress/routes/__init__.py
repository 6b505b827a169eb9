"""Routes: the manifest, one route, the table that a request is looked up in. Pure."""
