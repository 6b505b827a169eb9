"""The desired state of the groups in this term: which there are, may have workers, are pinned or paused. No I/O."""
