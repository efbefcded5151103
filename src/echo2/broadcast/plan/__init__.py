"""From measured rates to streams. Pure."""
