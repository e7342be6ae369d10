"""SGLang plug-in."""
