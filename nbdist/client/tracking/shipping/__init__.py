"""From the spool into MLflow: the process that sends, what it sends, the UI that shows it."""
