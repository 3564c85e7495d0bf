import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Translator(nn.Module):
    def __init__(self, wide: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(1000, wide, padding_idx=0), nn.Embedding(1000, wide)
        self.core = nn.Transformer(wide, 4, 3, 3, 512, batch_first=True)
        self.head = nn.Linear(wide, 1000)

    def forward(self, source, target):
        later = self.core.generate_square_subsequent_mask(target.shape[1], device=target.device)
        padding = source == 0
        out = self.core(
            self.source(source), self.target(target), tgt_mask=later,
            src_key_padding_mask=torch.zeros_like(padding, dtype=later.dtype).masked_fill(padding, -1e9),
            tgt_is_causal=True,
        )  # fmt: skip
        return self.head(out)


model = Translator().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
for step in range(8):
    source = torch.randint(0, 1000, (16, 48), device=device)
    target = torch.randint(1, 1000, (16, 41), device=device)
    logits = model(source, target[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, 1000), target[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} loss {loss:.4f} norm {norm:.3f}")
