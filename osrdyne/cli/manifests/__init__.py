"""Commands about manifests: the documents of a pool that can be applied, compared and rolled back."""
