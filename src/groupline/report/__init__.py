"""Reports read run files only; nothing but the command line imports them."""
