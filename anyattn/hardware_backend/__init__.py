"""The only place that names a vendor's SDK; one folder a vendor, one file a backend."""
