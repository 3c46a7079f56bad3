"""Which tests a change reaches, and running them."""
