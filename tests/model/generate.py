"""Write the truth that test_golden.py holds the decoder to: `python tests/model/generate.py FILE.gguf`.

Needs torch and transformers, which nothing else here does. The weights come through the `gguf` package's own
reader; the decoder is transformers', in float32. Nothing of tinyllm takes part.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import LlamaConfig, LlamaForCausalLM

COLUMNS = slice(0, None, 96)  # of the vocabulary; all of it would be 8 MB
NEW = 50
PROMPTS = {
    "plain": [504, 3575, 282, 4649, 314],  # The capital of France is
    # What is the capital of France? - in the model's chat template
    "chat": [
        *[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712],
        *[8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    ],
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def model(path: str) -> Any:
    """The model of a GGUF file, as transformers has it."""
    reader = GGUFReader(path)
    say = {key: field.contents() for key, field in reader.fields.items() if key.startswith("llama.")}
    raw = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    heads = {"attn_q": say["llama.attention.head_count"], "attn_k": say["llama.attention.head_count_kv"]}
    weights = {
        "model.embed_tokens.weight": raw["token_embd.weight"],
        "model.norm.weight": raw["output_norm.weight"],
    }
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for i in range(say["llama.block_count"]):
        for name, ours in NAMES.items():
            array = raw[f"blk.{i}.{ours}.weight"]
            if ours in heads:  # neighbouring dimensions rotate in GGUF; here, those half a head apart
                split = array.reshape(heads[ours], -1, 2, array.shape[-1])
                array = split.swapaxes(1, 2).reshape(array.shape)
            weights[f"model.layers.{i}.{name}.weight"] = array
    config = LlamaConfig(
        vocab_size=len(raw["token_embd.weight"]),
        hidden_size=say["llama.embedding_length"],
        intermediate_size=say["llama.feed_forward_length"],
        num_hidden_layers=say["llama.block_count"],
        num_attention_heads=say["llama.attention.head_count"],
        num_key_value_heads=say["llama.attention.head_count_kv"],
        max_position_embeddings=say["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": say["llama.rope.freq_base"]},
        rms_norm_eps=say["llama.attention.layer_norm_rms_epsilon"],
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config).float().eval()
    made.load_state_dict(
        {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}, strict=True
    )
    return made


def truth(llama: Any, prompt: list[int]) -> dict[str, Any]:
    """Logits of the prompt, all of them in one number each position, and the ids that follow it."""
    torch.set_grad_enabled(False)
    logits = llama(torch.tensor([prompt])).logits[0].double()
    ids = list(prompt)
    for _ in range(NEW):  # without a cache of keys and values: what is there to go wrong is left out
        ids.append(int(llama(torch.tensor([ids])).logits[0, -1].argmax()))
    return {
        "prompt": np.array(prompt, np.int32),
        "ids": np.array(ids[len(prompt) :], np.int32),
        "logits": logits[:, COLUMNS].float().numpy(),
        "logsumexp": logits.logsumexp(-1).numpy(),
    }


if __name__ == "__main__":
    llama = model(sys.argv[1])
    found = {
        f"{name}_{what}": array
        for name, prompt in PROMPTS.items()
        for what, array in truth(llama, prompt).items()
    }
    np.savez_compressed(Path(__file__).with_name("truth.npz"), **found)
    for name in PROMPTS:
        print(name, found[f"{name}_ids"].tolist())
