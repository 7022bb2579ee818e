"""Who offers what: hook specifications, built-in offers, and the manager that loads and audits plugins."""
