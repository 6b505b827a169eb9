"""The observed state of the workers in this term: instances, reports, crashes, delays of their next start. No I/O."""
