"""What an exception of Spark means for a caller or an operator: one line, a reason, the setting to change."""
