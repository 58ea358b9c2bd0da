"""What the adapters of several libraries share."""
