"""Speed and memory side by side, as ratios measured in one run: what `rmt bench` measures, one file per part.

`harness` times functions in interleaved rounds; `cases` holds the shapes and the rows; `stock` is a transformer of
torch modules, as a user would write it; `checks` compares all rows on a small input first, so that no speed is reported
for wrong numbers; `stack`, `step`, `decode`, `loss`, `memory` and `profile` measure; `targets` judges the figures;
`suite` runs it all into one result, plain data; `table` and `picture` show it.
"""
