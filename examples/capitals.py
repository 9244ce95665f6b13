"""An own task for a chat model: the capitals of countries. `make real-llm` trains SmolLM2-135M-Instruct on it.

`python -m examples.capitals --model DIR --chat --max-new-tokens 12`; docs/rewards.md has what it came to.
"""

import random

from pipeline.records import Problem, Task
from pipeline.settings import Settings
from train_gsm8k import main

CAPITALS = """Afghanistan Kabul, Albania Tirana, Algeria Algiers, Angola Luanda, Armenia Yerevan, Australia Canberra,
Austria Vienna, Azerbaijan Baku, Bangladesh Dhaka, Belarus Minsk, Belgium Brussels, Bolivia Sucre, Botswana Gaborone,
Brazil Brasilia, Bulgaria Sofia, Cambodia Phnom, Canada Ottawa, Chile Santiago, China Beijing, Croatia Zagreb,
Cuba Havana, Cyprus Nicosia, Denmark Copenhagen, Ecuador Quito, Egypt Cairo, Eritrea Asmara, Estonia Tallinn,
Ethiopia Addis, Fiji Suva, Finland Helsinki, France Paris, Gabon Libreville, Georgia Tbilisi, Germany Berlin,
Ghana Accra, Greece Athens, Guyana Georgetown, Honduras Tegucigalpa, Hungary Budapest, Iceland Reykjavik,
India Delhi, Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Ireland Dublin, Italy Rome, Jamaica Kingston, Japan Tokyo,
Jordan Amman, Kenya Nairobi, Laos Vientiane, Latvia Riga, Lebanon Beirut, Liberia Monrovia, Libya Tripoli,
Lithuania Vilnius, Mali Bamako, Malta Valletta, Mongolia Ulaanbaatar, Morocco Rabat, Mozambique Maputo,
Namibia Windhoek, Nepal Kathmandu, Netherlands Amsterdam, Nicaragua Managua, Nigeria Abuja, Norway Oslo,
Pakistan Islamabad, Peru Lima, Philippines Manila, Poland Warsaw, Portugal Lisbon, Qatar Doha, Romania Bucharest,
Russia Moscow, Rwanda Kigali, Senegal Dakar, Serbia Belgrade, Slovakia Bratislava, Slovenia Ljubljana,
Somalia Mogadishu, Spain Madrid, Sudan Khartoum, Sweden Stockholm, Switzerland Bern, Syria Damascus, Tanzania Dodoma,
Thailand Bangkok, Turkey Ankara, Uganda Kampala, Ukraine Kyiv, Uruguay Montevideo, Uzbekistan Tashkent,
Venezuela Caracas, Vietnam Hanoi, Yemen Sanaa, Zambia Lusaka, Zimbabwe Harare"""


def capitals(settings: Settings) -> Task:
    """The countries in random order: the first are for training, the last for tests. Right is what names it."""
    pairs = [pair.split() for pair in CAPITALS.split(",")]
    random.Random(0).shuffle(pairs)
    problems = [Problem(country, f"What is the capital of {country}?", gold=capital) for country, capital in pairs]
    train, test = problems[: -settings.test_problems][: settings.problems], problems[-settings.test_problems :]
    return Task("capitals", train, test, reward=lambda completion, p: 1.0 if p.gold in completion else -1.0)


if __name__ == "__main__":
    main("capitals", __doc__, capitals)
