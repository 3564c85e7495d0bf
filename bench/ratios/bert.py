import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, MASK = 2000, 1


class Masked(nn.Module):
    def __init__(self, wide: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, wide)
        self.places = nn.Parameter(torch.zeros(128, wide))
        layer = nn.TransformerEncoderLayer(wide, 4, 4 * wide, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(wide, VOCABULARY)

    def forward(self, words):
        return self.head(self.layers(self.words(words) + self.places))


model = Masked().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
for step in range(8):
    for _ in range(2):
        words = torch.randint(2, VOCABULARY, (8, 128), device=device)
        hidden = torch.rand(words.shape, device=device) < 0.15
        logits = model(words.masked_fill(hidden, MASK))
        targets = words.masked_fill(~hidden, -100)
        loss = nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1)) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    warm.step()
    if step % 4 == 0:
        print(step, 2 * loss.item())
