"""Configuration of a run: sections, the whole, loading and rendering."""
