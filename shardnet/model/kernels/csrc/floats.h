/* What linear.c calls of floats.c, which multiplies with weights of float32. */

#ifndef SHARDNET_FLOATS_H
#define SHARDNET_FLOATS_H

#include "linear.h"

#define DEPTH 256      /* inputs that all rows are multiplied by before the next: of a panel, what the first cache holds */
#define FLOAT_ROWS 96  /* rows that are multiplied together, at most */
#define FLOAT_PANELS 4 /* panels that they are multiplied by: as much of rows as the second cache holds is read once */

/* Lays a row out in p->quantized: [blocks of DEPTH inputs][rows][DEPTH], the last block narrower. */
void shardnet_lay_out_floats(const struct linear *p, int64_t row);

/* Computes sums[panel][row][output] of the `n_panels` panels from `panel` on, for the `n_rows` rows from `row` on. */
void shardnet_sum_floats(const struct linear *p, int64_t panel, int n_panels, int64_t row, int n_rows,
                         float sums[FLOAT_PANELS][FLOAT_ROWS][PANEL]);

#endif
