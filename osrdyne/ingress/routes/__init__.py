"""Routes: the manifest, one route, and the table that finds the routes of a request. Pure."""
