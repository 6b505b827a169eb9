"""The Java process (JVM) of a worker: its start and end, its memory, its compilers, its connection to Python."""
