"""`dppo-megatron report`: one run or several as a single HTML file that needs no network."""
