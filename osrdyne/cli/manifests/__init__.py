"""Commands about manifests: the documents of a pool that are applied, compared and rolled back."""
