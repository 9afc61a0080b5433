"""Templates of the arithmetic task whose answer takes one step."""

from groupline.tasks.arithmetic_templates import Template

TEMPLATES = (
    Template(
        "apples_bought",
        ("a+b",),
        th=("{name}มีแอปเปิล {a} ผล ซื้อเพิ่มอีก {b} ผล ตอนนี้{name}มีแอปเปิลกี่ผล", "มีแอปเปิล {} ผล"),
        zh=("{name}有 {a} 个苹果，又买了 {b} 个。{name}现在有多少个苹果？", "苹果有 {} 个"),
        en=("{name} has {a} apples and buys {b} more. How many apples does {name} have now?", "apples now: {}"),
    ),
    Template(
        "class_pupils",
        ("a+b",),
        th=("ห้องเรียนหนึ่งมีนักเรียนชาย {a} คน และนักเรียนหญิง {b} คน ห้องนี้มีนักเรียนทั้งหมดกี่คน", "มีนักเรียนทั้งหมด {} คน"),
        zh=("一个班有 {a} 名男生和 {b} 名女生。这个班一共有多少名学生？", "学生共有 {} 名"),
        en=("A class has {a} boys and {b} girls. How many pupils are in the class?", "pupils in all: {}"),
    ),
    Template(
        "rice_and_juice",
        ("a+b",),
        th=("ข้าวผัดจานละ {a} บาท น้ำส้มแก้วละ {b} บาท ซื้ออย่างละหนึ่งที่ต้องจ่ายกี่บาท", "ต้องจ่าย {} บาท"),
        zh=("一份炒饭 {a} 元，一杯果汁 {b} 元。两样各买一份，要付多少元？", "一共要付 {} 元"),
        en=(
            "A plate of fried rice costs {a} dollars and a glass of juice costs {b} dollars. "
            "How many dollars do they cost together?",
            "dollars together: {}",
        ),
    ),
    Template(
        "farm_birds",
        ("a+b",),
        th=("ฟาร์มแห่งหนึ่งเลี้ยงไก่ {a} ตัว และเป็ด {b} ตัว มีไก่และเป็ดรวมกันกี่ตัว", "รวมกันได้ {} ตัว"),
        zh=("农场里养了 {a} 只鸡和 {b} 只鸭。鸡和鸭一共有多少只？", "鸡和鸭共有 {} 只"),
        en=("A farm keeps {a} chickens and {b} ducks. How many birds is that in all?", "birds in all: {}"),
    ),
    Template(
        "bus_stop",
        ("a-b",),
        th=("รถเมล์คันหนึ่งมีผู้โดยสาร {a} คน ลงที่ป้ายแรก {b} คน เหลือผู้โดยสารบนรถกี่คน", "เหลือผู้โดยสาร {} คน"),
        zh=("公共汽车上有 {a} 名乘客，到站时下车 {b} 名。车上还剩多少名乘客？", "车上还剩 {} 名"),
        en=("A bus carries {a} passengers. At a stop {b} of them get off. How many are left?", "passengers left: {}"),
    ),
    Template(
        "pages_left",
        ("a-b",),
        th=("หนังสือเล่มหนึ่งมี {a} หน้า {name}อ่านไปแล้ว {b} หน้า เหลืออีกกี่หน้าที่ยังไม่ได้อ่าน", "เหลืออีก {} หน้า"),
        zh=("一本书有 {a} 页，{name}已经读了 {b} 页。还剩多少页没有读？", "还剩 {} 页"),
        en=("A book has {a} pages. {name} has read {b} of them. How many pages are still unread?", "pages unread: {}"),
    ),
    Template(
        "snack_money",
        ("a-b",),
        th=("{name}มีเงิน {a} บาท ซื้อขนมไป {b} บาท {name}เหลือเงินกี่บาท", "เหลือเงิน {} บาท"),
        zh=("{name}有 {a} 元，买零食花了 {b} 元。{name}还剩多少元？", "还剩 {} 元"),
        en=("{name} has {a} dollars and spends {b} on snacks. How many dollars are left?", "dollars left: {}"),
    ),
    Template(
        "egg_trays",
        ("a*b",),
        th=("มีไข่ไก่ {a} ถาด ถาดละ {b} ฟอง มีไข่ไก่ทั้งหมดกี่ฟอง", "มีไข่ทั้งหมด {} ฟอง"),
        zh=("有 {a} 盘鸡蛋，每盘 {b} 个。一共有多少个鸡蛋？", "鸡蛋共有 {} 个"),
        en=("There are {a} trays with {b} eggs on each. How many eggs are there in all?", "eggs in all: {}"),
    ),
    Template(
        "pens_price",
        ("a*b",),
        th=("ปากการาคาด้ามละ {a} บาท {name}ซื้อ {b} ด้าม ต้องจ่ายเงินกี่บาท", "ต้องจ่าย {} บาท"),
        zh=("一支钢笔 {a} 元，{name}买了 {b} 支。一共要付多少元？", "一共要付 {} 元"),
        en=("A pen costs {a} dollars. {name} buys {b} pens. How many dollars does {name} pay?", "dollars to pay: {}"),
    ),
    Template(
        "hall_chairs",
        ("a*b",),
        th=("ห้องประชุมมีเก้าอี้ {a} แถว แถวละ {b} ตัว มีเก้าอี้ทั้งหมดกี่ตัว", "มีเก้าอี้ทั้งหมด {} ตัว"),
        zh=("会议室里有 {a} 排椅子，每排 {b} 把。一共有多少把椅子？", "椅子共有 {} 把"),
        en=("A hall has {a} rows of {b} chairs. How many chairs are in the hall?", "chairs in all: {}"),
    ),
    Template(
        "sweets_shared",
        ("a/b",),
        th=("ครูแบ่งลูกอม {a} เม็ดให้นักเรียน {b} คน คนละเท่า ๆ กัน นักเรียนได้ลูกอมคนละกี่เม็ด", "ได้คนละ {} เม็ด"),
        zh=("老师把 {a} 颗糖平均分给 {b} 名学生。每名学生分到多少颗糖？", "每人分到 {} 颗"),
        en=("A teacher shares {a} sweets equally among {b} pupils. How many does each pupil get?", "sweets each: {}"),
    ),
    Template(
        "mango_baskets",
        ("a/b",),
        th=("ชาวสวนเก็บมะม่วงได้ {a} ผล จัดใส่ตะกร้า ตะกร้าละ {b} ผล ได้มะม่วงกี่ตะกร้า", "จัดได้ {} ตะกร้า"),
        zh=("果农摘了 {a} 个芒果，每筐装 {b} 个。一共装了多少筐？", "一共装了 {} 筐"),
        en=("A farmer picks {a} mangoes and packs {b} in each basket. How many baskets is that?", "baskets: {}"),
    ),
)
