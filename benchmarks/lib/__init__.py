"""What the commands above share."""
