"""The API for authors of workers: the application, a call, the codec of bodies, and errors."""
