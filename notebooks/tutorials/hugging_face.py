"""A model of transformers on ringlab's attention: train on packed documents, then
generate: 40 seconds.
"""

import torch
from ringlab import Dense, Dilated
from ringlab.integrations.transformers import LiveCache, register, set_pattern
from transformers import LlamaConfig, LlamaForCausalLM

register()  # makes attn_implementation="ringlab" known; from_pretrained takes it too
torch.manual_seed(0)
sizes = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
config = LlamaConfig(
    vocab_size=64, num_key_value_heads=2, pad_token_id=0, eos_token_id=None, **sizes
)
model = LlamaForCausalLM._from_config(config, attn_implementation="ringlab")
ladder = Dilated([64, 256, 1024], [1, 4, 16])
set_pattern(
    model, [ladder, ladder, ladder, Dense()]
)  # one for each layer; saved with the config

document = torch.arange(16).repeat(64) * 3 + 2  # 1,024 tokens of a period of 16
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(40):
    lengths = torch.randint(50, 1000, (3,)).tolist()
    tokens = torch.cat([document[:n] for n in lengths])[None]
    where = torch.cat([torch.arange(n) for n in lengths])[
        None
    ]  # positions start anew with each document
    labels = tokens.masked_fill(
        where == 0, -100
    )  # no document predicts the first token of the next
    loss = model(tokens, position_ids=where, labels=labels, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss:.3f}") if step % 10 == 9 else None

cache = LiveCache(model, max_length=1300)
prompt = document[None, :1000]
new = model.generate(
    prompt, max_new_tokens=200, do_sample=False, past_key_values=cache
)[0, 1000:]
right = (new == document.repeat(2)[1000:][: len(new)]).float().mean()
print(
    f"{right:.0%} of {len(new)} new tokens follow the period; the cache takes {cache.nbytes / 2**20:.1f} MiB"
)
