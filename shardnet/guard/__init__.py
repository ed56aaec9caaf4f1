"""Helper processes: what strangers wrote is read under limits of time and memory."""
