"""The command `cost`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import BatchSizeOption, JsonOption, check_outputs, print_result


def cost_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or config.json, GGUF file or hub name; the weights aren't needed. The"
            " built-in model unless given."
        ),
    ] = None,
    embed_dim: Annotated[
        int | None, typer.Option(help="Instead of a model: causal attention of this model width.")
    ] = None,
    num_heads: Annotated[
        int | None, typer.Option(help="Number of query heads, with --embed-dim.")
    ] = None,
    num_kv_heads: Annotated[
        int | None,
        typer.Option(help="Number of key/value heads; that of the query heads unless given."),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Width of a head; embed_dim / num_heads unless given.")
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(help="Number of such layers; 1 unless given.")
    ] = None,
    kv_latent_dim: Annotated[
        int | None, typer.Option(help="Width of the latent of keys and values (MLA).")
    ] = None,
    rotary_dim: Annotated[
        int | None, typer.Option(help="Width of a head's rotary part (MLA), on top of --head-dim.")
    ] = None,
    q_latent_dim: Annotated[
        int | None, typer.Option(help="Width of the latent of queries (MLA).")
    ] = None,
    v_head_dim: Annotated[
        int | None, typer.Option(help="Width of a head's values (MLA); --head-dim unless given.")
    ] = None,
    num_window_layers: Annotated[
        int | None, typer.Option(help="How many of the layers have the --window; all unless given.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence and in the cache; 4,096 unless given.")
    ] = None,
    batch_size: BatchSizeOption = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Number format: float32, bfloat16, float16, float8, ...; of the cache alone: int8,"
            " int4, int2, q8_0, q5_1, q5_0, q4_1, q4_0. The config's unless given."
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Limit causal layers to this many keys per query.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of one device (80GiB, 24GB) for weights and cache: also print the longest"
            " context and the largest batch that fit.",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(help="Also print the weights and cache of each of so many devices."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of all weights; that of the files unless given, or of the parameters in the"
            " dtype.",
        ),
    ] = None,
    json: JsonOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw cache and arithmetic over the context length here (.png)."
        ),
    ] = None,
) -> None:
    """Compute what a model's attention costs: parameters, arithmetic, memory and KV cache, also
    with other numbers of heads.
    """
    check_outputs(json=(json, ".json"), plot=(plot, ".png"))
    from ..costs.cost import cost

    result = cost(
        model,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_layers=num_layers,
        kv_latent_dim=kv_latent_dim,
        rotary_dim=rotary_dim,
        q_latent_dim=q_latent_dim,
        v_head_dim=v_head_dim,
        num_window_layers=num_window_layers,
        context_length=context_length,
        batch_size=batch_size,
        dtype=dtype,
        window=window,
    )
    fit = None
    if memory is not None or tensor_parallel is not None or weights is not None:
        devices = 1 if tensor_parallel is None else tensor_parallel
        fit = result.fit(memory, tensor_parallel=devices, weights=weights)
    if json is not None:
        result.save(json, fit)
    if plot is not None:
        result.plot(plot)
    print_result(result if fit is None else f"{result}\n\n{fit}", json, plot)
