"""What the author of a worker writes against: the application, one call, the codec of bodies, and errors."""
