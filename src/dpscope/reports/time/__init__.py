"""Step time against batch, sequence and memory: charts of the page and the trade-off figure."""
