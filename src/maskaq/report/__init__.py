"""The report of a run: what it needs of the models (`collect`), of the folder (`record`), and the page itself."""
