"""Cross-entropy in all its forms.

labels      reads and checks integer labels; how losses are reduced
rows        the kernel of losses where classes are contiguous, and what it does with a row, for each plain loss
columns     the same where each lane of a vector holds another sample: along other axes, and for short rows transposed
options     the losses with all options, by rows and by columns
shards      rows whose classes are split over processes
dense       losses whose labels are probabilities
"""
