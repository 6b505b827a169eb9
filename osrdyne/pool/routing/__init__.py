"""Routes and splitter of a managed pool in one term: manifests, priorities, retries, deadlines."""
