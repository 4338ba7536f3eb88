"""The ``lynx`` command: the only place that prints, reads files and rounds."""
