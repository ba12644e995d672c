"""The configuration: its schema, its rules, its TOML form, and what a resumed run may change."""
