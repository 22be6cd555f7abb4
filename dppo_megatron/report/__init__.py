"""`dppo-megatron report`: what runs came to, as one HTML file that needs no network."""
